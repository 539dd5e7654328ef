"""What a beginner cannot tell from the numbers alone: is the first loss normal, has memorising begun."""

import math


def first_loss_hint(loss: float, vocab_size: int) -> str | None:
    """A sentence if the first loss is far from ln(vocab_size), the loss of a model that knows nothing."""
    expected = math.log(vocab_size)
    if abs(loss - expected) <= 0.1 * expected + 0.1:
        return None
    if loss < expected:
        reason = "expected when the weights come from training, otherwise look at the data"
    else:
        reason = "the data may not fit the tokenizer, or the initial weights are too large"
    return f"the first loss {loss:.2f} is far from ln({vocab_size:,}) = {expected:.2f}, a fresh model's: {reason}."


class OverfitWatch:
    """Notices that validation loss rises while training loss falls; speaks once for each best value."""

    PATIENCE = 3  # evaluations without a new best
    RISE = 1.005  # by less than half a percent it may be noise

    def __init__(self) -> None:
        self._best: tuple[float, float, int] | None = None  # val loss, train loss then, step
        self._worse = 0

    def evaluated(self, step: int, val_loss: float, train_loss: float) -> str | None:
        """The hint to show after this evaluation, if any."""
        if self._best is None or val_loss < self._best[0]:
            self._best, self._worse = (val_loss, train_loss, step), 0
            return None
        best_val, train_then, best_step = self._best
        self._worse += val_loss > best_val * self.RISE and train_loss < train_then
        if self._worse != self.PATIENCE:
            return None
        return (
            f"the validation loss has risen from {best_val:.4f} (step {best_step:,}) to {val_loss:.4f} while the "
            f"training loss fell: the model memorises its data. best.pt keeps the weights of step {best_step:,}; "
            "more data, more dropout or fewer updates would help."
        )
