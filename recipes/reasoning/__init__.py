"""Short reasoning tasks of the package reasoning-gym.

They suit text models such as SmolLM2-135M-Instruct.
"""
