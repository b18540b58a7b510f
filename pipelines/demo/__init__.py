"""The embedded target `demo`: its scenes, its data and the recipe that builds it."""
