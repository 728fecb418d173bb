// Browsers do not let a page from a file read others, so a search there shows titles only.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
