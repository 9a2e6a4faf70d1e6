"""Training objectives, such as span corruption: they make numbered examples from a token stream.

A token stream is the tokens of all documents, one document after the other.
"""
