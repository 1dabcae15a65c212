"""What a run will take: steps, tokens, time and memory, from its configuration, its model's shapes
and measured steps.
"""
