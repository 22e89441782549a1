"""`python -m fa_advisor`."""

from fa_advisor.cli import main

if __name__ == "__main__":
    main()
