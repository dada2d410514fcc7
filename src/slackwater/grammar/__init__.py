"""What an answer must look like: wishes of clients compiled, checked, and followed token by
token.
"""
