"""``python -m halfstep``: the command line without its script on the PATH."""

from halfstep.cli import main

if __name__ == "__main__":  # worker processes of `compare` import this module again
    main()
