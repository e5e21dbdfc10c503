"""What is sketched, how, and at which rank.

cached        weights that write into a cache of keys and values, as units with a budget of their own
trace         a model's graph where one is to be had; else, given data, a run of it
own_weights   weights that a module's own forward multiplies by, lifted to layers, and lowered back
sites         what can be sketched in a model, and why the rest is left alone
selection     which layers the options select
other_weights weights that no layer of a known kind holds
asked_types   layers that a forward asks the type of
routers       linear layers that score experts
plan          a scheme and a rank for every weight under one budget
shared_factor weights that store one factor in common, at no more stored numbers
recipe        a plan that was given, followed as it stands
coupled       layers that are narrowed together, as one unit of a plan
in_data       units whose ways to store them are judged in the metric of data
int8_time     budgets of the time of int8 products in place of stored numbers
timing        layers and whole models timed beside their sketches
ratio_search  the smallest ratio within a drop of a score
fastest       Where time counts
"""
