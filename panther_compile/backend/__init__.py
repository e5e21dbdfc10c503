"""The backend `panther` of `torch.compile`.

panther       the backend
data          layers fitted to data, for the graphs that Dynamo makes of one model
factor_cache  factors remembered by the weights they were computed from
"""
