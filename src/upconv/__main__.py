"""``python -m upconv``."""

from upconv.cli import main

if __name__ == "__main__":
    main()
