"""How fast this machine multiplies matrices in each dtype, size and layout: measured, not looked up.

    settings.py    what to measure, checked before anything runs
    products.py    one product: dtype, size, layout; its operands, its operations, its bytes
    timing.py      rounds in turn, on a time budget; threads and TF32 set and put back
    measure.py     all products of one run -> a Measurement
    verdict.py     what the numbers say, in words that are computed
    plot.py        the picture        table.py   the tables for a terminal
    files.py       matmul.json and matmul.png

``halfstep bench --matmul`` is this package behind a renderer.
"""
