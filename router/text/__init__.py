"""Between texts and token ids: what prompts are made of, and what is read out of answers.

    messages ──chat_template──> text ──tokenizer──> token ids        token ids ──detokenizer──> text
                                                     text ──reasoning──> what was thought │ said ──tool_calls──> calls

    harmony               answers of messages (gpt-oss), in which both take turns
    tool_formats          which way of writing calls a template teaches
    calls                 those ways
    structured_outputs    forms that answers are held to, as grammars
    structural_tags       of these, text with tags in it
    schemas               of these, JSON
    words                 words in a text that comes in pieces
    token_bytes           what each token stands for

Knows no worker, and of the wire the shapes of forms and calls alone. No torch.
"""
