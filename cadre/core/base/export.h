// CADRE_EXPORT marks what is visible outside libcadre_core.so and libcadre.so: every type and
// function of a public header that is compiled into a library. All other symbols are hidden.
#pragma once

#define CADRE_EXPORT [[gnu::visibility("default")]]
