"""Short reasoning tasks of the package reasoning-gym, for text models such as
SmolLM2-135M-Instruct.
"""
