"""`python -m nanogpt_cli` is the command `nanogpt`; worker processes are started this way."""

from nanogpt_cli.cli.main import main

if __name__ == "__main__":
    main()
