"""The plugin of vLLM 0.32: drafters served as they were trained. Only vLLM's processes import its modules."""
