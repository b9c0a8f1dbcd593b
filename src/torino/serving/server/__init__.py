"""The server of ``torino serve``: OpenAI's chat completions with fewer visual tokens.

``options`` holds its settings, ``app`` its HTTP interface, ``local`` the engine in the same process, ``front`` the
engine in another one, and ``launch`` starts it.
"""
