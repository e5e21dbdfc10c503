"""Where pipeline stages end.

cut          minimum cuts, one way only, nested             (no torch)
chains       dynamic program over nested cuts               (no torch)
schedule     gpipe, 1f1b, interleaved; event simulator      (no torch)
mesh_search  devices ──► meshes, the most promising first   (no torch)
split        one module a stage, with its own parameters
ends         Prefixes chosen as the ends of pipeline stages, by the program of `chains`. No torch in here
units        Units of a model
"""
