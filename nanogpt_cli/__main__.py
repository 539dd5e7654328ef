"""`python -m nanogpt_cli` is the command `nanogpt`; worker processes are started this way."""

import os
import signal

if "NANOGPT_LAUNCHER" in os.environ:  # a rank: until training begins, Ctrl-C ends it without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from nanogpt_cli.cli.main import main

if __name__ == "__main__":
    main()
