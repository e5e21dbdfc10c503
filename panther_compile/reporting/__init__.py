"""What people look at.

tables  what `print(plan)` and `print(report)` show
plots   what `report.plot` and `curve.plot` draw
progress  Progress bars that leave nothing behind
"""
