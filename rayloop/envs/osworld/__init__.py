"""OSWorld's machines as an environment; OSWorld itself runs in a Python of its own. Not run on real machines."""
