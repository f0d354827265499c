"""``python -m confed.cli``."""

from confed.cli import main

if __name__ == "__main__":
    main()
