"""Train, fine-tune, evaluate and sample small GPTs: nanoGPT's job as an installable program."""

__version__ = "0.1.0"
