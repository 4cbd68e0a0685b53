"""Checks whether a request can be served, before anything is spent on it, and reports all violations by field name.

    request          all of it: sizes, names, the prompt          sampling      its parameters
    tools            messages, tools, and their grammar           resumption    answers that it continues
    unknown_fields   fields of newer clients
    grammar_checker  whose grammar is compiled next, and which are known already; grammar_process: compiles them in
                     a separate process, where a bad one does no harm
    violations       the violations, by field, that all of these report

Pure, except for the grammar checker, which owns a process. Nothing here knows workers.
"""
