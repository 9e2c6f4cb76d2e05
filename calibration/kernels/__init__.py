"""From tables of kernels to the terms of a model (`fit_model`), a card (`fit_card`) or a GPU (`fit_gpu`)."""
