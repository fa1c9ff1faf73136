"""The codec of messages: encodes values of known and registered types, and limits what it decodes.

May import the lower package's errors and settings, and its compiled library.
"""
