"""The paper, one file per step.

1. `backbone`           Section 3, step 1: the over-pruned backbone and the pool
2. `importance`         step 2, equation 3: layer importance on the trained backbone
3. `..graph.grouping`   step 3: layers of the same spatial size form a group (part of `trace`, so that `graph.groups` exists)
4. `reallocation`       step 4, equations 4 and 5: the pool goes to the groups
5. `distillation`       step 5: training the slim network with the original as teacher
"""
