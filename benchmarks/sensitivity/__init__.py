"""How many tokens each kind of evidence needs, for every hazard and for changes that look harmless.

    python -m benchmarks.sensitivity generate --folder DIR [--runs 20] [--lossless 200] [--jobs 2]
    python -m benchmarks.sensitivity table --folder DIR [--write docs/sensitivity.md]

``generate`` decodes every case on the embedded model with seeds of its own, 6,000 tokens a run, scores
each run under the unchanged model and leaves one ``.npz`` file a run; what is there is not made again.
``table`` judges the files, proves every hazard on the tiny model and prints the tables. 200 lossless and 20
runs of every other case are about 800 runs: three to four hours on two cores; ``--only`` picks cases.
"""
