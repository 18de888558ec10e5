"""The experiment: tasks x regimes x seeds, on this machine, with verdicts that are computed."""
