"""The plugin of vLLM: drafters served as they were trained. Only vLLM's processes import its modules."""
