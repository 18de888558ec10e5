"""How fast this machine multiplies matrices and steps optimizers: measured, not looked up.

    clock.py         threads, waiting for the device, the spread of rounds
    machine.py       facts about the machine       checks.py   where, on how many threads, for how long
    reports.py       data and picture under a name  files.py    both on disk        style.py   looks of a picture

``halfstep bench --steps``: every rule, storage and executor against torch's usual recipe

    steps_storages.py steps_tensors.py    names become storages and shapes
    steps_settings.py                     what to measure, checked before anything runs
    steps_recipes.py                      one way to take a step, ours or torch's
    steps_bytes.py                        bytes that live, bytes that must move, the floor
    steps_measure.py                      rounds in turn, on a time budget
    steps_cells.py                        what came out: a StepMeasurement
    steps_verdict.py steps_table.py steps_plot.py

``halfstep bench --matmul``: products by dtype, size and layout

    settings.py    what to measure, checked before anything runs
    products.py    one product: dtype, size, layout; its operands, its operations, its bytes
    timing.py      rounds in turn, on a time budget; TF32 set and put back
    measure.py     all products of one run -> a Measurement
    verdict.py     what the numbers say, in words that are computed
    plot.py        the picture        table.py   the tables for a terminal
"""
