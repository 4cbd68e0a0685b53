"""Converts between texts and token ids: makes prompts, and reads answers.

    messages ──chat_template──> text ──tokenizer──> token ids        token ids ──detokenizer──> text
                                                     text ──reasoning──> thoughts │ content ──tool_calls──> calls

    one_template          what a chat template writes, and how it takes messages
    template_environment  where chat templates run; template_kwargs: the variables that users give them
    harmony               answers made of messages (gpt-oss), in which thoughts and calls take turns
    thoughts, said        the words around thoughts; what a reader has found and not emitted yet
    tool_formats          which format of tool calls a chat template teaches
    calls                 these formats
    structured_outputs    grammars that constrain answers
    structural_tags       of these, free text with constrained tags
    tag_fields            reads their JSON
    schemas               of these, JSON schemas
    words                 finds words in a text that comes in pieces
    token_bytes           the bytes that each token stands for
    bad_words             texts that an answer must not contain, as tokens

Knows no worker, and of the wire only the messages for structured outputs and tool calls. No torch.
"""
