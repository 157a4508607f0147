"""``python -m sm70lab``."""

from sm70lab.cli import entry

if __name__ == "__main__":
    entry()
