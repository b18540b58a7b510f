"""Responses and features with vLLM: a process in the engine environment runs the target, ours stores."""
