"""Accuracy of windtunnel itself: kernels held out of the database, error files derived from them, pages of tables.

Commands: ``python -m benchmarks.accuracy.<name>`` with kernel_report, kernel_errors, served_errors or page.
"""
