"""What people look at.

folding   layers that repeat, in one row
progress  progress bars that leave nothing behind
tables    what `print(plan)` and `print(report)` show
layer_table  a row for each layer, of a plan or a report
plan_text what divided a budget, in words
ratio_curve  how the score of a model depends on its ratio
plots     what `report.plot` and `curve.plot` draw
"""
