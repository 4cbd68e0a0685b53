"""Whether a request can be served, before anything is spent on it: every violation, each by the name of its field.

    request          all of it: sizes, names, the prompt          sampling      its parameters
    tools            messages, tools, the form they ask for       resumption    answers that it goes on with
    grammar_checker  forms, compiled where a bad one harms nobody
    violations       what is wrong, by field, as all of these tell it

Pure, but for the grammar checker, which owns a process. Nothing here knows workers.
"""
