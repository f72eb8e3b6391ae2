"""`python -m eagle3lab`."""

from eagle3lab.cli import main

if __name__ == "__main__":
    main()
