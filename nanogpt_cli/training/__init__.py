"""From a request to a trained model: plan, start, loop and step, what they save, and how a run goes on."""
