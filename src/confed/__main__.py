"""``python -m confed``."""

from confed.cli import main

if __name__ == "__main__":
    main()
