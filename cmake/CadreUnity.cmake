# Unity builds: the sources of one folder are compiled together as a few units, because most of the
# compile time goes into headers that all of them include. CMake's own UNITY_BUILD names the sources
# by absolute paths, with which a compiler cache cannot be used by another checkout. Every source
# must still compile alone: tools/alone checks this, and -DCADRE_UNITY=OFF compiles each source
# alone.
option(CADRE_UNITY "Compile the sources of a folder together" ON)

# Sources and folders, relative to the source tree, that are always compiled alone.
set(cadre_compiled_alone "")

# cadre_unity(TARGET size [WITH_SUBFOLDERS]): replaces the sources of TARGET by units of at most
# `size` sources of one folder, or, with WITH_SUBFOLDERS, of a second-level folder such as
# cadre/parallel/fsdp and the folders below it: use it for sources whose compile time depends more
# on the number of units than on their length. A unit uses the precompiled headers if one of its
# sources does.
function(cadre_unity target size)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  if(NOT CADRE_UNITY)
    return()
  endif()
  set(folders "")
  foreach(source IN LISTS sources)
    get_filename_component(file ${source} ABSOLUTE)
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${CMAKE_SOURCE_DIR})
    get_filename_component(folder ${file} DIRECTORY)
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    if(definitions OR file IN_LIST cadre_compiled_alone OR folder IN_LIST cadre_compiled_alone)
      continue()
    endif()
    if("WITH_SUBFOLDERS" IN_LIST ARGN)
      string(REGEX REPLACE "^([^/]+/[^/]+/[^/]+)/.*" "\\1" folder ${folder})
    endif()
    get_source_file_property(is_plain ${source} SKIP_PRECOMPILE_HEADERS)
    string(MAKE_C_IDENTIFIER ${folder} folder)
    list(APPEND folders ${folder})
    if(is_plain)
      list(APPEND plain_of_${folder} ${source})
    else()
      list(APPEND with_headers_of_${folder} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder IN LISTS folders)
    set(members ${with_headers_of_${folder}} ${plain_of_${folder}})
    list(LENGTH members count)
    list(LENGTH with_headers_of_${folder} num_with_headers)
    math(EXPR num_units "(${count} + ${size} - 1) / ${size}")
    math(EXPR last "${num_units} - 1")
    foreach(unit RANGE ${last})
      math(EXPR begin "${unit} * ${count} / ${num_units}")
      math(EXPR length "(${unit} + 1) * ${count} / ${num_units} - ${begin}")
      list(SUBLIST members ${begin} ${length} in_unit)
      if(length GREATER 1)
        cadre_replace_by_unit(${target} ${folder}_${unit} ${in_unit})
        if(begin GREATER_EQUAL num_with_headers)
          set_source_files_properties(${CMAKE_BINARY_DIR}/unity/${target}/${folder}_${unit}.cpp
                                      PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
        endif()
      endif()
    endforeach()
  endforeach()
endfunction()

# Replaces sources of the target by one file that includes them.
function(cadre_replace_by_unit target name)
  set(text "")
  foreach(source IN LISTS ARGN)
    get_filename_component(file ${source} ABSOLUTE)
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${CMAKE_SOURCE_DIR})
    string(APPEND text "#include \"${file}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/unity/${target}/${name}.cpp CONTENT "${text}" @ONLY)
  # In included files, unlike in the main file, g++ warns of a class with a member whose type is in
  # an anonymous namespace.
  set_source_files_properties(${CMAKE_BINARY_DIR}/unity/${target}/${name}.cpp
                              PROPERTIES COMPILE_OPTIONS "$<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>")
  get_target_property(sources ${target} SOURCES)
  list(REMOVE_ITEM sources ${ARGN})
  list(APPEND sources ${CMAKE_BINARY_DIR}/unity/${target}/${name}.cpp)
  set_target_properties(${target} PROPERTIES SOURCES "${sources}")
endfunction()
