"""The cost of a stage, the resources of the machine, and the next steps of a workspace."""
