"""The command line, behind the extra ``[cli]``; nothing else in the library imports it."""
