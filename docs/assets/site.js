// What scrolls sideways can be reached by the keyboard, and parts of the theme get names for screen readers.
// The theme wraps tables and visits code blocks after it has loaded.
document$.subscribe(() => setTimeout(() => {
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((nav, i) => nav.setAttribute("aria-label", `Code block ${i + 1}`));
}, 200));
