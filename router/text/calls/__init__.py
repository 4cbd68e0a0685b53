"""How families of models write calls of tools: one file for each way of writing.

call_format      what a format is: its words, what reads one call, the grammar of an answer that is calls
objects          JSON that comes in pieces: where an object ends, what a whole one calls
object_calls     {"name": …, "arguments": …}, with words around it or none: hermes, llama3_json
"""
