"""Action languages: how the models of a family write their actions, as data (``*.yaml``)."""
