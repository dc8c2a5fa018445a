"""Native DeepSpeed checkpoints: ZeRO-0, 1, 2, 3 and BF16_Optimizer, as the ranks wrote them."""
