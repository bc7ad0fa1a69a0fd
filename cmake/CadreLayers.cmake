# A folder's files are known by their suffix: x.cpp is the library, x_test.cpp a test, x_bench.cpp a
# bench, x_fuzz.cpp a fuzz target.

# cadre_sources(OUT kind folder...): kind is library, test, bench or fuzz.
function(cadre_sources out kind)
  set(found "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND found ${files})
  endforeach()
  if(kind STREQUAL "library")
    list(FILTER found EXCLUDE REGEX "_(test|bench|fuzz|main)\\.cpp$")
  else()
    list(FILTER found INCLUDE REGEX "_${kind}\\.cpp$")
  endif()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
