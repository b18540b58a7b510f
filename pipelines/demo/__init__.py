"""The embedded target: a small Qwen2.5-VL that the project trains on scenes it draws itself."""
