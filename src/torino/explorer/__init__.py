"""The explorer: a web application that shows why a visual token survived (``torino explore``).

Needs ``pip install "torino[serve]"``. The page in ``assets`` is built from the folder ``explorer`` of the repository.
"""
