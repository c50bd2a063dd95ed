"""What is special about a kind of model, one file each. The trace finds the groups; recipes label and choose them.

``convolutions``  inverted bottlenecks: how many stages; residual blocks: the paper's exclusions
``attention``     heads and their dims: temperature, and the numbers that attention code computes shapes with
"""
