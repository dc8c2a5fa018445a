"""The universal checkpoint of DeepSpeed: one folder a parameter, one file a state, full shapes."""
