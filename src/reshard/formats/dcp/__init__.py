"""PyTorch's distributed checkpoint (DCP): chunks of tensors in ``.distcp`` files, one index."""
