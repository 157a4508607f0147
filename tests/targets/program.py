"""A program that behaves as a model server does: children, slow starts, deaths. Run by test_process.

``python program.py [key=value …] --host H --port P …``

say=TEXT          prints it first
exit=CODE         and ends
delay=S           seconds before it listens
deaf=1            ignores SIGTERM
never=1           never listens
children=FILE     starts a child and two grandchildren in sessions of their own (one of them orphaned at once,
                  with an empty environment) and appends each one's pid to FILE, with its own
"""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = [sys.executable, __file__]


def sleep() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def orphan() -> None:
    """Start a grandchild of the caller's in a session of its own, and leave it alone."""
    print(subprocess.Popen([*PROGRAM, "sleep"], start_new_session=True, stdout=subprocess.DEVNULL).pid)


def child(file: str) -> None:
    alone = subprocess.run([*PROGRAM, "orphan"], env={}, stdout=subprocess.PIPE, text=True, check=True).stdout
    other = subprocess.Popen([*PROGRAM, "sleep"], start_new_session=True).pid
    with Path(file).open("a") as pids:
        pids.write(f"{os.getpid()}\n{alone}{other}\n")
    time.sleep(600)


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word and not word.startswith("-"))
    address = (sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1]))
    if "deaf" in given:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "say" in given:
        print(given["say"], flush=True)
    if "children" in given:
        with Path(given["children"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
        subprocess.Popen([*PROGRAM, "child", given["children"]])
    if "exit" in given:
        time.sleep(0.5)
        sys.exit(int(given["exit"]))
    print("loading the weights", flush=True)
    time.sleep(float(given.get("delay", 0)))
    if "never" in given:
        time.sleep(600)
    http.server.HTTPServer(address, Health).serve_forever()


if __name__ == "__main__":
    roles = {"sleep": sleep, "orphan": orphan, "child": child}
    if sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
    else:
        main()
