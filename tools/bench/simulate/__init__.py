"""The command ``bench simulate``: a training step on a stated machine that need not be here."""
